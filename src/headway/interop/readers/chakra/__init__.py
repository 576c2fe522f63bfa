"""MLCommons Chakra execution traces: what a rank computes and communicates, and what each of it waits for."""
