"""The live tuner of pipelines: their order follows what the network is seen to carry of their own messages."""
