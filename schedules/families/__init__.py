"""Families of schedules: each module takes the plain declaration to one kind of hardware as a story of named stages."""
