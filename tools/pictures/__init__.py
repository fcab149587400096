"""Makes the pictures of docs/images from the real service: `make pictures`."""
