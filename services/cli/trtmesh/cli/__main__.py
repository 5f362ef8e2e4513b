"""`python -m trtmesh.cli`: the `trtmesh` command."""

from trtmesh.cli.main import main

if __name__ == "__main__":
    main()
