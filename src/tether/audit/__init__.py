"""The doctor: rules over what a run recorded, each of which names a disease, its cause and its cure."""
