"""What passes hold in memory, found out by watching them."""
