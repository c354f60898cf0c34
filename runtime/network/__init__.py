"""Networks and what architectures build them from."""
