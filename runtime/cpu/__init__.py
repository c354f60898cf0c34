"""Decoding steps on the CPU: all layers of one token as one program, without Python in between."""
