"""Round weights with the second moments of their inputs: error feedback, refinement, and the choice
of shrinking by held-out moments.
"""
