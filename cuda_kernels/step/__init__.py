"""What a decode step computes besides products and attention."""
