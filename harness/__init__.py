"""What a run of any model needs: files, documents, devices, ranks, models, instruments.  Imports nothing above it."""
