"""Pipeline schedules: the order of micro-batches on every rank, and the messages between ranks."""
