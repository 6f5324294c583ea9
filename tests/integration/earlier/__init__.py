"""What an earlier release left: its schema, and a run of it.

``fedpb.v1.binpb`` is the frozen schema of the first commit that speaks this ``PROTOCOL``;
``run.tar.gz`` is a run directory that the same commit wrote, of two clients, without its page.
``unset.txt`` lists keys of a config that have no value where it says nothing.
docs/releasing.md says when both are renewed.
"""
