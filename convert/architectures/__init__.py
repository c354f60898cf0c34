"""One file per model family. `registry` finds them by name; `base` and its neighbours hold what
families share.
"""
