"""The artefact: one .so with the checked entry, the manifest and the device code, and the cases that check it, beside it."""
