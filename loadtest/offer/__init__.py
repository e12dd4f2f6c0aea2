"""What is asked, and when: workloads, prompts, loads and their instants."""
