"""Measuring a machine: its links, its cores, and what plans cost there."""
