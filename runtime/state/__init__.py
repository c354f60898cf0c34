"""What a sequence keeps from call to call, and the types it is stored in."""
