"""What can be trained, one folder for each workload."""
