"""Second moments of the inputs of every weight matrix: collecting them, and their file."""
