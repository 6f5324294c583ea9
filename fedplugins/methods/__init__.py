"""Methods that none of the four papers compares with: a file each, as a user would add one."""
