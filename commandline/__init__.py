"""Parse the command line, show help and complete words in a shell."""
