"""Jobs as people write and start them, recorded, planned and run over two lab hosts."""
