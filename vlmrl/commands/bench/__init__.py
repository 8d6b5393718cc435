"""`vlmrl bench`: measurements that a user can repeat on another machine and compare. One JSON object per line."""
