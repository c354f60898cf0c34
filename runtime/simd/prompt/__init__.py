"""Operations of prompts that are no products with weights: float32, many rows at a time."""
