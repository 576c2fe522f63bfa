"""Layer 3: how. Chunk programs for collectives, with a live executor and a replay."""
