"""One file per model family. `registry` finds families by name; `base` and the other modules hold
what families share.
"""
