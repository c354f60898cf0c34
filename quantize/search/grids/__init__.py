"""The search for codebook types, whose codes are entries of a grid."""
