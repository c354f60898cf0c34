"""How the command line reads its words, shows help and completes in a shell."""
