"""The pages that a browser is shown: static files of this folder, which ask nobody but this server for anything."""
