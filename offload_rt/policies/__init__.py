"""Policies: which tokens a layer attends to. One file each; they return ids and never copy rows."""
