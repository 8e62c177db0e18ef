"""What flows through the suite: cells, records of runs, machines."""
