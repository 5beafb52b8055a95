"""MLX: affine integers and small floats in U32 words."""
