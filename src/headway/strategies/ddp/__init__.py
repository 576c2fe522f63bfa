"""Stock DistributedDataParallel with a chosen bucket size."""
