"""What every layer uses: flags, the error catalogue, events, logs, the pass runner, text. Imports nothing of ours."""
