"""A model placed by a device map: its weights loaded, offloaded and streamed."""
