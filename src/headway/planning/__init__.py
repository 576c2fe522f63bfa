"""Plans bucket schedules, predicts their steps quickly, and bounds every plan from below."""
