"""The whole chain on an embedded model, as a command that needs no other files and no network."""
