"""What carries buckets between ranks while a thread trains: channels, their groups and streams, and who watches."""
