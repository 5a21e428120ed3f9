"""What a person reads: progress while a run goes on, tables of a plan and of a manifest's faults."""
