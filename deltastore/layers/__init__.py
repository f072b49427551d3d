"""What one commit stores of a partition: full, overlay or xor, encoded and applied bit for bit."""
