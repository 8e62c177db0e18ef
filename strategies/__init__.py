"""What is measured: how one training step is cut over ranks. Imports nothing else of this project."""
