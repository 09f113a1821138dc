"""The doctor: rules over what a run recorded. Each names a problem, its cause and its repair."""
