"""The parts of `graft.py`: its arguments, the host, the graft and its controls, their training and their report."""
