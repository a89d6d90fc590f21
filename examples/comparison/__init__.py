"""Side-by-side training of methods on one protocol; `compare.py` is its command line, `language.py` a list of cells."""
