"""Time and bytes of every collective with every codec, beside what gloo and MPI do with f32."""
