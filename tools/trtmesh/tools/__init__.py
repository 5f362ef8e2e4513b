"""Commands that no running mesh needs: builders, converters, importers, a Triton client, replay."""
