import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FsShell;
import org.apache.hadoop.util.ToolRunner;

/** `hdfs dfs` in one process: each line of the input is a command, its words parted by tabs; told is its exit code. */
public class HadoopShell {
    public static void main(String[] ignored) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        for (String line; (line = lines.readLine()) != null; ) {
            answers.println(ToolRunner.run(new Configuration(), new FsShell(), line.split("\t")));
            answers.flush();
        }
    }
}
