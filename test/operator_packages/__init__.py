"""What a package of operators for an existing device needs: adapters of two libraries that others wrote."""
