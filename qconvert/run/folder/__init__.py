"""An output folder: claimed, journalled, resumed, verified, published."""
