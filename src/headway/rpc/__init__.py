"""Messages between ranks of a job: bounded frames over connections authenticated by the job's secret."""
