"""The doctor: rules over what a run recorded. Each finding names a problem, its cause and its repair."""
