"""The whole chain on an embedded model, as a command that needs nothing but itself."""
