"""What carries buckets between ranks beside a training thread: channels, their groups and streams, and who watches."""
