"""What a run tells while it goes on: events, their lines, its status, its traces."""
