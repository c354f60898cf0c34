"""What all layers of prompts share: the residual stream, weights, graphs."""
